"""Plan to text: the job script, the node script, the image definition. Templates hold no arithmetic and no defaults."""
