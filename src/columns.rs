//! Text tables of the operator subcommands.

/// Left-aligned columns, two spaces apart.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(i, cell)| format!("{cell:<w$}", w = width(i).unwrap_or(0)));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}
