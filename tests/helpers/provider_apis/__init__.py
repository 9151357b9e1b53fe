"""APIs of clouds in memory, by which the Terraform providers themselves are run: what is made stands, and can be asked for."""
