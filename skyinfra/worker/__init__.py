"""The process of a slot: executing tasks and ranks, their inputs, output, cancellation and checkpoints."""
