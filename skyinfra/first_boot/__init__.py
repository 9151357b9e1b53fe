"""Sets a node up at its first boot, and at every later one what is missing then: `python3 -m first_boot`.

It runs before anything is installed, under the Python of the system: standard library only, the syntax of Python 3.8,
and nothing of the rest of skyinfra. Its files travel in the user data as they are, with the steps that the compiler
has put together, see `skyinfra.bootstrap.steps`.
"""
