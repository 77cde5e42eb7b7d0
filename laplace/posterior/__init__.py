"""The posterior over weights as one immutable value, and users' members that replace parts of it."""
