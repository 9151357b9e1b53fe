"""The places of a pool that has several: what each is called, and the file that says which of them counts."""
