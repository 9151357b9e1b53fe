"""The program of a client on a node: its files, its modules, and its script as the module ``__main__``.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only.
"""
