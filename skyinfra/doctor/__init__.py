"""``skyinfra-runner doctor``: examines a node, and says what to do about what it finds."""
