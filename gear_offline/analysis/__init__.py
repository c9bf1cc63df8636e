"""What sampling strategies draw and teach."""
