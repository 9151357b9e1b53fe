"""Configurations of mig-parted."""

# Ends a configuration of mig-parted: a layout with nothing in it, and one that fits on no H100.
ODD_PARTED_CONFIGS = """\
  empty:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  wrong:
    - devices: all
      mig-enabled: true
      mig-devices: {"4g.40gb": 2}
"""
