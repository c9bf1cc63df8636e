"""What a cluster would need for a recipe, and how fast it would be: `gear-offline plan`."""
