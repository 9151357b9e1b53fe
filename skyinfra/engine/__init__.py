"""What is added to Dask, the engine: settings, mutual TLS, waiting."""
