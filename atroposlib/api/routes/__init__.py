"""Routes by who calls them; HTTP in, HTTP out, no arithmetic."""
