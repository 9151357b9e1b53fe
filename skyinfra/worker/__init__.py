"""The process of a slot: executing tasks and ranks, their inputs, output, cancellation and checkpoints.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only.
"""
