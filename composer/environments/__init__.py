"""What a model acts in: tasks, tools and machines."""
