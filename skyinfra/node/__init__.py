"""This machine as a node: its folder, its configuration, and the processes of its runner."""
