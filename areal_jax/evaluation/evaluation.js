// Charts of an evaluation.
"use strict";

function estimateLine(label, color, found) {
  const column = (place) => found.map((each) => each[place]);
  return {key: label, label, color, x: column(0), y: column(1), low: column(2), high: column(3), smooth: false};
}

const data = JSON.parse(document.getElementById("data").textContent);
const container = document.getElementById("charts");
const scores = data.scores.map(([label, found], place) => estimateLine(label, COLORS[place], found));
if (scores.length && scores[0].x.length > 1) {
  showChart(container, {id: "scores", title: "Score of k samples", note: "The band is a 95 % interval.", unit: "share", lines: scores,
    synced: false, xLog: true});
}
const {edges, counts} = data.lengths;
if (counts.length) {
  showChart(container, {id: "lengths", title: "Tokens of an answer", unit: "answers", synced: false, zero: true, bars: edges,
    lines: [{key: "answers", label: "answers", color: COLORS[0], x: edges.slice(0, -1), y: counts}]});
}
if (data.shares.length > 1) {
  showChart(container, {id: "shares", title: "Problems by share of correct answers", note: "Problems from the easiest to the hardest.",
    unit: "share", synced: false, zero: true,
    lines: [{key: "share", label: "correct answers", color: COLORS[0], x: data.shares.map((_, place) => place + 1), y: data.shares}]});
}
