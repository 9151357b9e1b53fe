"""Tasks that tests send to nodes, which import them: nothing heavy is imported here, and no file read on import."""
