"""The modules of all providers under one contract: a case and a recorded state each, and APIs of marketplaces."""
