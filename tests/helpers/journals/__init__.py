"""Journals of jobs: samples, and processes that end in the middle of writing one."""
