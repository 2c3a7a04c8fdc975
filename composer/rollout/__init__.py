"""From a task to a trajectory: schedule, session, recorder."""
