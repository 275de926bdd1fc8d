"""How the report looks: light and dark as the reader's system asks for, and on paper; pure."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1c2126;--dim:#5d6872;--edge:#d9dee3;
--warn:#fff4d6;--warn-edge:#d9a400;--good:#e7f5ea;--good-edge:#4b9b5f;
--c0:#1f6fb2;--c1:#c4501b;--c2:#2d8a4e;--c3:#8b4fb0;--c4:#a8841a;--c5:#5b6670}
@media (prefers-color-scheme:dark){:root{--ground:#16191d;--text:#e4e8ec;--dim:#9aa5af;
--edge:#333a41;--warn:#3a3112;--warn-edge:#b98e1a;--good:#17301e;--good-edge:#4b9b5f;
--c0:#6cb2ec;--c1:#f08a58;--c2:#66c487;--c3:#c08fe0;--c4:#d9b84a;--c5:#a4afb8}}
body{margin:0;background:var(--ground);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:1.5rem}
h1{font-size:1.5rem;margin:0 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:1.5rem 0 .5rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:.6rem;margin:0}
.facts div{border:1px solid var(--edge);border-radius:6px;padding:.5rem .7rem}
dt{color:var(--dim);font-size:.8rem}dd{margin:0;font-size:1rem;font-weight:600;
overflow-wrap:anywhere}
.held-out{border:1px solid var(--edge);border-radius:6px;padding:.6rem 1rem;margin:0 0 1rem}
.held-out h2{margin:0}.held-out ul{margin:.3rem 0 0;padding-left:1.2rem;font-size:1.1rem;
font-weight:600;overflow-wrap:anywhere}
.meanings{display:grid;grid-template-columns:max-content 1fr;gap:.2rem .9rem;margin:0}
.meanings dt{font-size:.9rem}.meanings dd{font-size:.9rem;font-weight:400}
.warn,.good{border-left:4px solid var(--good-edge);background:var(--good);padding:.6rem 1rem;
margin:1rem 0;border-radius:0 6px 6px 0}
.warn{border-color:var(--warn-edge);background:var(--warn)}
.warn h2{margin:0}.warn ul{margin:.3rem 0;padding-left:1.2rem}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:1rem;
margin-top:1rem}
figure{margin:0;border:1px solid var(--edge);border-radius:6px;padding:.6rem;break-inside:avoid}
figcaption small,.note{color:var(--dim)}
svg{width:100%;height:auto;display:block;margin-top:.3rem}
.grid{stroke:var(--edge);stroke-width:1}.tick{fill:var(--dim);font-size:13px}
.line{fill:none;stroke:var(--colour);stroke-width:1.8;stroke-linejoin:round}
.pale{opacity:.3;stroke-width:1}.area{fill:var(--colour);opacity:.75}.dot{fill:var(--colour)}
.c0{--colour:var(--c0)}.c1{--colour:var(--c1)}.c2{--colour:var(--c2)}.c3{--colour:var(--c3)}
.c4{--colour:var(--c4)}.c5{--colour:var(--c5)}
.legend{font-size:.8rem;display:flex;flex-wrap:wrap;gap:.2rem .9rem}
.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em;
background:var(--colour)}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
.pairs th,.pairs td{text-align:left;font-weight:400;white-space:normal;overflow-wrap:anywhere}
.pairs th{color:var(--dim);white-space:nowrap}
.gap td{text-align:center;color:var(--dim)}
details{margin-top:.8rem}summary{cursor:pointer}
@media print{main{max-width:none;padding:0}.charts{grid-template-columns:1fr 1fr}}
""".replace("\n", "")
