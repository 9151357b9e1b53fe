"""What runs on a node: inventory, partitioner, workers, interruption, ``skyinfra-runner``.

Travels to nodes with `skyinfra.mig` and `skyinfra.protocol`: standard library, ``distributed``, ``cloudpickle``,
``cryptography`` and ``pynvml`` only.
"""
