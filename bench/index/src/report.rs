//! Runs every index in turns and prints the table.

use std::collections::BTreeMap;
use std::process::Command;

const ROUNDS: usize = 3;
const PEERS: [&str; 3] = ["smg", "dynamo-crtc", "dynamo-radix"];
const HEAD: &str = "| blocks | W | index | 32 hit p50 / p99 ns | 1,024 hit p50 / p99 | 1,024 half p50 / p99 | 1,024 miss p50 / p99 | apply M blocks/s | B/membership |";

/// Columns where lower is better.
const P50: [usize; 4] = [0, 2, 4, 6];
/// Column where higher is better.
const APPLY: usize = 8;
const BYTES: usize = 9;
const REPORTED: usize = 10;

/// `quick`: one size, one round.
pub fn run(quick: bool) {
    let (sizes, rounds): (&[usize], usize) =
        if quick { (&[1_000_000], 1) } else { (&[1_000_000, 10_000_000], ROUNDS) };
    println!("{HEAD}");
    println!("|{}", "---|".repeat(HEAD.matches('|').count() - 1));
    for &blocks in sizes {
        for workers in [8, 64, 1000] {
            let indexes: Vec<&str> = match workers {
                1000 => vec!["kvasir"],
                _ => std::iter::once("kvasir").chain(PEERS).collect(),
            };
            let mut rows: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
            for _ in 0..rounds {
                for index in &indexes {
                    rows.entry(index).or_default().push(child(index, workers, blocks));
                }
            }
            let rows: BTreeMap<&str, Vec<f64>> =
                rows.into_iter().map(|(index, rounds)| (index, medians(&rounds))).collect();
            for index in &indexes {
                print(blocks, workers, index, &rows[index]);
            }
            if indexes.len() > 1 {
                ratios(blocks, workers, &rows);
            }
        }
    }
}

fn child(index: &str, workers: usize, blocks: usize) -> Vec<f64> {
    let program = std::env::current_exe().expect("a path of its own");
    let output = Command::new(program)
        .args(["one", index, &workers.to_string(), &blocks.to_string()])
        .output()
        .expect("a child");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{index}: {}", String::from_utf8_lossy(&output.stderr));
    text.split_whitespace().map(|number| number.parse().expect("a number")).collect()
}

fn medians(rounds: &[Vec<f64>]) -> Vec<f64> {
    let median = |column: usize| {
        let mut values: Vec<f64> = rounds.iter().map(|row| row[column]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (0..rounds[0].len()).map(median).collect()
}

fn print(blocks: usize, workers: usize, index: &str, row: &[f64]) {
    let times: Vec<String> = P50.iter().map(|&c| format!("{:.0} / {:.0}", row[c], row[c + 1])).collect();
    let own = if row[REPORTED] > 0.0 {
        format!(" ({:.1} by its own account)", row[REPORTED])
    } else {
        String::new()
    };
    println!(
        "| {} M | {workers} | {index} | {} | {:.1} | {:.1}{own} |",
        blocks / 1_000_000,
        times.join(" | "),
        row[APPLY],
        row[BYTES]
    );
}

/// Ratio of Kvasir's value to the best other index's in each column.
fn ratios(blocks: usize, workers: usize, rows: &BTreeMap<&str, Vec<f64>>) {
    let of = |column: usize, better: fn(f64, f64) -> f64| {
        let best = PEERS.iter().map(|peer| rows[peer][column]).reduce(better).expect("peers");
        rows["kvasir"][column] / best
    };
    let times: Vec<String> = P50.iter().map(|&c| format!("{:.2}x", of(c, f64::min))).collect();
    println!(
        "| {} M | {workers} | **of the best peer** | {} | {:.2}x | {:.2}x |",
        blocks / 1_000_000,
        times.join(" | "),
        of(APPLY, f64::max),
        of(BYTES, f64::min)
    );
}
