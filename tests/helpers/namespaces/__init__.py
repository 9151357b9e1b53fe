"""Nodes with a network namespace each, whose links can fail, and the bridge between them."""
