"""Content-addressed blobs: the store, their transfer, trees of files, and payloads. Travels to nodes."""
