"""The report's style sheet. It loads nothing; light and dark by the reader's own setting; A4 when printed."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ground:#f4f6f9;--card:#fff;--line:#dde3ea;--grid:#e7ecf1;--text:#15202b;--soft:#51606f;
--accent:#1d5fd1;--spot:#0b7d77;--demand:#9a5b00;--free:#5b6b7b;--red:#b3261e;--green:#17713a;--green-soft:#e3f4e8;
--red-soft:#fbe9e7;--blue-soft:#e6eefb;--s1:#b45309;--s2:#7c3aed;--s3:#0b7d77;--s4:#64748b;--in-bar:#fff}
@media (prefers-color-scheme:dark){:root{--ground:#0e1318;--card:#161d25;--line:#2a3541;--grid:#232d38;--text:#e8eef4;
--soft:#a3b2c1;--accent:#7db5ff;--spot:#3cc9bd;--demand:#f0b35a;--free:#94a5b5;--red:#ff8f86;--green:#74dd92;
--green-soft:#15301f;--red-soft:#3a1c1a;--blue-soft:#182a44;--s1:#f0b35a;--s2:#c4a5ff;--s3:#3cc9bd;--s4:#a3b2c1;
--in-bar:#08110f}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--text);line-height:1.5;font-size:15px;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1168px;margin:0 auto;padding:28px 24px 40px}
h1{font-size:30px;line-height:1.2;margin:4px 0 0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 2px;letter-spacing:-.005em;overflow-wrap:anywhere}
p{margin:0}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.92em}
.brand{color:var(--soft);font-size:13px;letter-spacing:.02em}
.title{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center}
.lead{color:var(--soft);font-size:17px;margin-top:8px;max-width:46em;overflow-wrap:anywhere}
.lead strong{color:var(--text);font-weight:600}
.banner{margin-top:14px;padding:10px 14px;border-radius:10px;background:var(--blue-soft);
color:var(--text);font-size:14px}
.pill{display:inline-block;padding:3px 12px;border-radius:99px;font-size:13px;font-weight:600;
background:var(--blue-soft);color:var(--accent)}
.pill.done{background:var(--green-soft);color:var(--green)}
.pill.bad{background:var(--red-soft);color:var(--red)}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:16px;margin:24px 0 16px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:14px;min-width:0}
.tile{padding:16px 18px}
.tile .name{color:var(--soft);font-size:13px}
.tile .value{
font-size:28px;font-weight:650;letter-spacing:-.02em;line-height:1.25;margin-top:2px;overflow-wrap:anywhere}
.tile .more{color:var(--soft);font-size:13px}
.tile.good .value{color:var(--green)}
.card{padding:20px 22px;margin-top:16px}
.card>.what{color:var(--soft);font-size:13.5px;margin-bottom:12px}
.half{display:grid;grid-template-columns:1fr 1fr;gap:16px}
.half>.card{margin-top:16px}
.split{display:grid;grid-template-columns:1fr 1fr;gap:32px;align-items:start}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 10px;padding:0;list-style:none;font-size:13px;
color:var(--soft)}
.legend li{display:flex;align-items:center;gap:7px;min-width:0;overflow-wrap:anywhere}
.key{flex:none}
.chart{display:block;max-width:100%;height:auto;overflow:visible}
.chart{width:100%}
.n .chart{max-width:520px}
.m .chart{max-width:880px}
.n,.m,.w{display:none}
@media (max-width:619px){.n{display:block}}
@media (min-width:620px) and (max-width:1079px){.m{display:block}}
@media (min-width:1080px){.w{display:block}}
text{font-size:11.5px;fill:var(--soft);font-family:inherit}
text.zone{font-size:12.5px;font-weight:600;fill:var(--text);paint-order:stroke;stroke:var(--card);stroke-width:5px}
text.in-bar{font-size:11.5px;font-weight:600;fill:var(--in-bar)}
text.bar-name{font-size:13.5px;fill:var(--text)}
text.bar-amount{font-size:14.5px;font-weight:650;fill:var(--text)}
.grid{stroke:var(--grid);stroke-width:1}
.axis{stroke:var(--line);stroke-width:1}
.bar.spot{fill:var(--spot)}
.bar.on-demand{fill:var(--demand)}
.bar.free{fill:var(--free)}
.boot{fill:var(--card);fill-opacity:.55}
.move{fill:none;stroke:var(--accent);stroke-width:1.6;stroke-dasharray:3 3}
.interruption{stroke:var(--red);stroke-width:1.5}
.interruption-head{fill:var(--red)}
.resume{stroke:var(--accent);stroke-width:1.2;stroke-dasharray:2 3}
.resume-head{fill:var(--accent)}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.fine{stroke-width:1.1;stroke-opacity:.65}
.stem{stroke:var(--accent);stroke-width:1.2;stroke-opacity:.6}
.line.s0{stroke:var(--accent)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}.line.s3{stroke:var(--s3)}
.line.s4{stroke:var(--s4)}
.line.rest{stroke:var(--soft);stroke-width:1;stroke-opacity:.4}
.dot.rest,.key .rest{fill:var(--soft);fill-opacity:.6}
a{color:var(--accent)}
a:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
a:hover .line.rest{stroke-opacity:1;stroke-width:2}
tr:target{background:var(--blue-soft)}
.tag.bad{color:var(--red)}
.dot.s0,.key .s0{fill:var(--accent)}.dot.s1,.key .s1{fill:var(--s1)}.dot.s2,.key .s2{fill:var(--s2)}
.dot.s3,.key .s3{fill:var(--s3)}.dot.s4,.key .s4{fill:var(--s4)}
table{border-collapse:collapse;width:100%;font-size:14px}
caption{text-align:left;color:var(--soft);font-size:13px;padding-bottom:6px}
th{text-align:left;color:var(--soft);font-weight:600;font-size:13px}
th,td{padding:8px 10px 8px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
td.number,th.number{text-align:right;padding-right:0;padding-left:12px;white-space:nowrap;overflow-wrap:normal}
tfoot td,tfoot th{font-weight:650;color:var(--text);font-size:15px;border-bottom:0}
td small{display:block;color:var(--soft);font-size:12.5px}
.tag{font-size:12px;font-weight:600;border-radius:6px;padding:1px 7px;white-space:nowrap;color:var(--soft);
border:1px solid var(--line)}
.tag.on-demand{color:var(--demand)}
.tag.free{color:var(--green)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 20px;margin:10px 0 0;font-size:14px}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
details{margin-top:12px;font-size:14px}
summary{cursor:pointer;color:var(--accent);font-size:13.5px;width:max-content;max-width:100%}
summary:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:4px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--ground);border:1px solid var(--line);
border-radius:10px;padding:12px 14px;font-size:13px;margin:12px 0 0}
footer{color:var(--soft);font-size:13px;margin-top:24px}
footer p+p{margin-top:6px}
@media (max-width:1079px){.half,.split{grid-template-columns:1fr;gap:0}.split{gap:20px}}
@media (max-width:859px){.tiles{grid-template-columns:1fr 1fr}}
@media (max-width:619px){main{padding:18px 12px 32px}h1{font-size:25px}.lead{font-size:15.5px}
.tiles{gap:10px;margin:18px 0 10px}.tile{padding:12px 14px}.tile .value{font-size:22px}
.card{padding:16px 14px;margin-top:10px}
.half>.card{margin-top:10px}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}
.stacked thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
.stacked tr{display:grid;grid-template-columns:1fr 1fr;gap:2px 14px;padding:10px 0;border-bottom:1px solid var(--line)}
.stacked td{display:block;padding:0;border:0;text-align:left;white-space:normal}
.stacked td:first-child,.stacked td.whole{grid-column:1/-1}
.stacked td:first-child{font-weight:600}
.stacked td:not(:first-child)::before{content:attr(data-name);display:block;color:var(--soft);font-size:12px}}
@media print{:root{color-scheme:light;--ground:#fff;--card:#fff;--line:#cfd6dd;--grid:#e3e8ed;--text:#111;--soft:#444;
--accent:#1d5fd1;--spot:#0b7d77;--demand:#9a5b00;--free:#5b6b7b;--red:#b3261e;--green:#17713a;--green-soft:#fff;
--red-soft:#fff;--blue-soft:#fff;--s1:#b45309;--s2:#7c3aed;--s3:#0b7d77;--s4:#64748b;--in-bar:#fff}
main{padding:0;max-width:none}.card,.tile{break-inside:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.n,.w{display:none}.m{display:block}.half,.split{grid-template-columns:1fr}@page{margin:14mm}}
"""
