"""Environments, episodes, scores."""
