//! Runs to plot, and a reader of SVG files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use train::metrics::{HealthRecord, METRICS_FILE, MetricsFile, Record, RunRecord, TrainRecord};
use train::plot::{PlotError, PlotSource, plot};

pub(super) struct Fixture(pub(super) TempDir);

impl Fixture {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes the records of a run to a folder with this name.
    pub(super) fn run(&self, name: &str, records: &[Record]) -> PlotSource {
        fs::create_dir_all(self.path(name)).unwrap();
        let mut file = MetricsFile::append(&self.path(name).join(METRICS_FILE)).unwrap();
        records.iter().for_each(|record| file.write(record).unwrap());
        PlotSource { name: None, path: self.path(name) }
    }

    pub(super) fn try_plot(&self, runs: &[PlotSource]) -> Result<Svg, PlotError> {
        let out = self.path("plot.svg");
        plot(runs, &[], &out).map(|()| Svg::read(&out))
    }

    pub(super) fn plot(&self, runs: &[PlotSource]) -> Svg {
        self.try_plot(runs).unwrap()
    }
}

/// SVG file. Each element is a line, and a text is between two of them.
pub(super) struct Svg(pub(super) String);

impl Svg {
    pub(super) fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.starts_with("<svg width=\"900\" ") && text.trim_end().ends_with("</svg>"));
        let mut elements = text.lines().filter(|line| line.starts_with('<'));
        assert!(elements.all(|line| !line.contains("NaN") && !line.contains("inf")), "a number that is none");
        Self(text)
    }

    pub(super) fn texts(&self) -> Vec<&str> {
        let elements = self.0.split("<text ").skip(1);
        elements.map(|text| text[text.find('>').unwrap() + 1..text.find("</text>").unwrap()].trim()).collect()
    }

    pub(super) fn has(&self, text: &str) -> bool {
        self.texts().iter().any(|other| other.contains(text))
    }

    pub(super) fn attribute<'a>(element: &'a str, name: &str) -> &'a str {
        let (_, rest) = element.split_once(&format!(" {name}=\"")).unwrap();
        rest.split_once('"').unwrap().0
    }

    /// Polylines with this colour.
    pub(super) fn lines(&self, color: &str) -> Vec<Polyline> {
        let element = |line: &str| {
            let points = Self::attribute(line, "points").split_whitespace();
            let point = |point: &str| point.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()));
            (
                Self::attribute(line, "opacity").parse().unwrap(),
                Self::attribute(line, "stroke-width").parse().unwrap(),
                points.map(|text| point(text).unwrap()).collect(),
            )
        };
        let lines =
            self.0.lines().filter(|line| line.starts_with("<polyline ") && Self::attribute(line, "stroke") == color);
        lines.map(element).collect()
    }

    /// Number of elements of a kind with this colour.
    pub(super) fn count(&self, element: &str, color: &str) -> usize {
        let start = format!("<{element} ");
        self.0.lines().filter(|line| line.starts_with(&start) && Self::attribute(line, "fill") == color).count()
    }
}

/// Opacity, width and points.
pub(super) type Polyline = (f64, u32, Vec<(i32, i32)>);

pub(super) const BLUE: &str = "#0072B2";

pub(super) const VERMILION: &str = "#D55E00";

pub(super) const GREEN: &str = "#009E73";

pub(super) fn run(precision: &str) -> Record {
    let run = RunRecord { precision: precision.into(), device: "cpu".into(), ..Default::default() };
    Record { run: Some(run), ..Default::default() }
}

pub(super) fn step(step: usize, loss: f64) -> Record {
    let train = TrainRecord { loss, grad_norm: 1.0, lr: 1e-3, tokens_per_second: 500.0, ..Default::default() };
    Record { step, train: Some(train), ..Default::default() }
}

pub(super) fn steps(losses: impl IntoIterator<Item = f64>) -> Vec<Record> {
    (1..).zip(losses).map(|(number, loss)| step(number, loss)).collect()
}

pub(super) fn held_out(step: usize, loss: f64) -> Record {
    Record { step, held_out_loss: Some(loss), ..Default::default() }
}

pub(super) fn health(step: usize, layers: &[(&str, HealthRecord)]) -> Record {
    let operand = |health| BTreeMap::from([("input".to_owned(), HealthRecord { step, ..health })]);
    let health = layers.iter().map(|(name, health)| ((*name).to_owned(), operand(*health))).collect();
    Record { step, health, ..Default::default() }
}

pub(super) fn db(db: f64) -> HealthRecord {
    HealthRecord { sqnr_db: Some(db), ..Default::default() }
}
