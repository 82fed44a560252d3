"""Runs, which are background responses, and the readers that follow their copies."""
