"""The older interface's rules for users' classes: members that take effect, and data that are assigned."""
