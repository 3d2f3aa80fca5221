"""What `init` makes and finds in the account."""
