"""Items, prompts, scores and curriculum of the procedural tasks of the package reasoning-gym."""
