"""Output in the cells of a notebook: bars, and pictures of fleets. It needs nothing but the IPython of the notebook."""
