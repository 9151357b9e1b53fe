"""AWS on this machine: an account of moto, in this process or as a server, and the projects that are deployed there."""
