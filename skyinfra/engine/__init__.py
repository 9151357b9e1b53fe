"""Additions to Dask, the engine: settings, mutual TLS, waiting, and the executor of calls. Travels to nodes."""
