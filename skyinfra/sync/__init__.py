"""The user's files and tasks as bytes, on their way to the fleet and back."""
