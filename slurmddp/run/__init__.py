"""The run folder: all that a run was made from and all that it left, and how runs are found and judged.

Import what is needed from the modules: `layout` (RunFolder), `create`, `snapshot`, `manifest`, `submission`,
`index`, `events`, `evidence`, `state`.
"""
