"""Pictures of a step as data: marks, lanes, the Gantt chart."""
