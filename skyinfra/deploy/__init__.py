"""Plan, apply and destroy, with costs and next steps; and the ``with`` block of a pool."""
