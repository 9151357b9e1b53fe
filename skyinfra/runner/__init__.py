"""The service of a node and its command line, ``skyinfra-runner``."""
