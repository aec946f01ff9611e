//! Runs to plot, and a reader of SVG files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use trainer::metrics::{HealthRecord, METRICS_FILE, Metrics, Record, RunRecord, TrainRecord};
use trainer::plot::{PlotSource, plot};

pub(super) const BLUE: &str = "#0072B2";
pub(super) const VERMILION: &str = "#D55E00";

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
        let mut file = Metrics::append(&self.path(name).join(METRICS_FILE)).unwrap();
        records.iter().for_each(|record| file.write(record).unwrap());
        PlotSource { name: Some(name.into()), path: self.path(name) }
    }

    pub(super) fn plot(&self, runs: &[PlotSource]) -> Svg {
        let out = self.path("plot.svg");
        plot(runs, &[], &out).unwrap();
        Svg::read(&out)
    }
}

/// SVG file. Each element is a line, and a text is between two of them.
pub(super) struct Svg(String);

type Points = Vec<(i32, i32)>;

impl Svg {
    pub(super) fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.starts_with("<svg width=\"1200\" ") && text.trim_end().ends_with("</svg>"));
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

    /// Points of the elements of a kind that have these attributes.
    fn points(&self, element: &str, attributes: &[String]) -> Vec<Points> {
        let point = |point: &str| point.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()));
        let points = |line: &str| line.split_once(" points=\"").unwrap().1.split_once('"').unwrap().0.to_string();
        let is_one = |line: &&str| line.starts_with(element) && attributes.iter().all(|a| line.contains(a));
        let lines = self.0.lines().filter(is_one).map(points);
        lines.map(|line| line.split_whitespace().map(|text| point(text).unwrap()).collect()).collect()
    }

    /// Curves with this colour. The first is in the legend.
    pub(super) fn curves(&self, color: &str) -> Vec<Points> {
        self.points("<polyline", &[format!("stroke=\"{color}\"")])
    }

    /// The line at zero of a chart of differences.
    pub(super) fn zero_line(&self) -> Points {
        self.points("<polyline", &["stroke=\"#000000\"".into(), "stroke-width=\"2\"".into()]).remove(0)
    }

    /// Mean points of the markers with this colour. The first is in the legend.
    pub(super) fn markers(&self, color: &str) -> Points {
        let mean = |points: Points| {
            let n = points.len() as i32;
            (points.iter().map(|point| point.0).sum::<i32>() / n, points.iter().map(|point| point.1).sum::<i32>() / n)
        };
        self.points("<polygon", &[format!("fill=\"{color}\"")]).into_iter().map(mean).collect()
    }

    /// Number of elements of a kind with this colour.
    pub(super) fn count(&self, element: &str, color: &str) -> usize {
        let start = format!("<{element} ");
        let is_of_color =
            |line: &&str| ["fill", "stroke"].iter().any(|name| line.contains(&format!("{name}=\"{color}\"")));
        self.0.lines().filter(|line| line.starts_with(&start)).filter(is_of_color).count()
    }
}

pub(super) fn run(precision: &str) -> Record {
    let run = RunRecord { precision: precision.into(), device: "cpu".into(), ..Default::default() };
    Record { run: Some(run), ..Default::default() }
}

pub(super) fn step(step: usize, loss: f64) -> Record {
    let train = TrainRecord { loss, grad_norm: 1.0, lr: 1e-3, tokens_per_second: Some(500.0), ..Default::default() };
    Record { step, train: Some(train), ..Default::default() }
}

pub(super) fn steps(losses: impl IntoIterator<Item = f64>) -> Vec<Record> {
    (1..).zip(losses).map(|(number, loss)| step(number, loss)).collect()
}

pub(super) fn held_out(step: usize, loss: f64) -> Record {
    Record { step, validation_loss: Some(loss), ..Default::default() }
}

pub(super) fn health(step: usize, layers: &[(&str, HealthRecord)]) -> Record {
    let operand = |health| BTreeMap::from([("input".to_owned(), HealthRecord { step, ..health })]);
    let health = layers.iter().map(|(name, health)| ((*name).to_owned(), operand(*health))).collect();
    Record { step, health, ..Default::default() }
}

pub(super) fn db(db: f64) -> HealthRecord {
    HealthRecord { sqnr_db: Some(db), ..Default::default() }
}
