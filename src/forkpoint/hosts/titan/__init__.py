"""torchtitan's models, entered at their inner attention. Nothing of torchtitan is imported."""
