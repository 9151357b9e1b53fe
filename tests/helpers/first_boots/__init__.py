"""First boots in a folder, and the check of cloud-configs."""
