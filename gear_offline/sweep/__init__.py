"""Runs over a grid."""
