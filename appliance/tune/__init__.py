"""Measuring what a plan cannot know: orders to measuring children, what they found, where it is kept."""
