"""APIs of clouds in memory, by which the Terraform providers themselves are run."""
