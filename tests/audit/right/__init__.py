"""Targets that are right, a module for each library: the audit must find nothing in them."""
