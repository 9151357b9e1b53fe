"""Front ends of users: terminals, notebooks, pages of the dashboard, JSON output, code blocks of the documents."""
