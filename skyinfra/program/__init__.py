"""The program of a client on a node: its files, its modules, its script as the module ``__main__``, and its bars.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only.
"""
