"""``skyinfra-runner doctor``: examines a node and proposes remedies."""
