"""Content-addressed blobs: the store, their transfer, trees of files, and payloads.

Travels to nodes: standard library, ``distributed`` and ``cloudpickle`` only. The process of a rank imports it as well,
and Dask only where that is needed.
"""
