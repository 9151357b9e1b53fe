"""The end of a node that nobody uses, or that has lived as long as is declared."""
