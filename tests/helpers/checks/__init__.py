"""Checks that several tests share: leaked secrets, packings, configurations of mig-parted."""
