//! Generation of text as configured.

mod stop;

use std::io::Write;
use std::num::NonZero;

use anyhow::Result;
use burn::tensor::backend::Backend;
use device_select::SelectedDevice;

use self::stop::StopStrings;
use super::config::RunConfig;
use super::generate_section::GenerateSection;
use super::text::Text;
use crate::TextStream;
use crate::model::{Batching, CausalLm, GenerateOptions, generate};

/// Generator with the settings of a configuration and a device.
pub(super) struct Generation<'a> {
    section: &'a GenerateSection,
    text: &'a Text,
    options: GenerateOptions,
}

/// State of a prompt's continuation.
struct Output<'a> {
    /// `None` once the text has ended.
    stream: Option<TextStream<'a>>,
    stop: StopStrings<'a>,
}

impl<'a> Generation<'a> {
    /// `independent_rows`: number of rows for which the model's linears, except the output layer,
    /// compute each row as if it were alone.
    pub(super) fn new<S>(
        config: &'a RunConfig<S>,
        text: &'a Text,
        selected: &SelectedDevice,
        independent_rows: usize,
    ) -> Self {
        let (section, seed) = (&config.generate, config.training.seed);
        let options = GenerateOptions {
            stop: text.stop(),
            sampling: section.sampling(seed),
            filters: section.filters,
            cache: section.kv_cache,
            // On a CPU, batched prompts give the same bits as alone.
            batching: match (selected, NonZero::new(independent_rows)) {
                (SelectedDevice::Cpu, Some(rows)) => Batching::Exact(rows),
                (SelectedDevice::Cpu, None) => Batching::Alone,
                _ => Batching::All,
            },
            ..GenerateOptions::new(section.max_new_tokens, text.tokenizer.num_choices())
        };
        Self { section, text, options }
    }

    /// Number of prompts generated together; groups of this size run one after another.
    pub(super) fn batch_size(&self, prompts: usize) -> usize {
        self.options.batching.size(prompts)
    }

    /// Passes the text that follows each of `prompts` to `take`, piece by piece, with the index of
    /// the prompt.
    pub(super) fn run<B: Backend, M: CausalLm<B>>(
        &self,
        model: &M,
        prompts: &[Vec<u32>],
        mut take: impl FnMut(usize, &str) -> Result<()>,
    ) -> Result<()> {
        let output = |prompt: &Vec<u32>| -> Result<Output<'_>> {
            let stream = self.text.tokenizer.stream_text_after(prompt)?;
            Ok(Output { stream: Some(stream), stop: StopStrings::new(&self.section.stop) })
        };
        let mut outputs = prompts.iter().map(output).collect::<Result<Vec<_>, _>>()?;
        generate(model, prompts, &self.options, &mut |number, token| {
            let Output { stream, stop } = &mut outputs[number];
            let Some(mut open) = stream.take() else { return Ok(false) };
            let Some(token) = token else {
                let (piece, ends) = stop.push(&open.finish()?);
                let rest = if ends { String::new() } else { stop.finish() };
                take(number, &(piece + &rest))?;
                return Ok(false);
            };
            let (piece, ends) = stop.push(&open.push(token)?);
            *stream = (!ends).then_some(open);
            take(number, &piece)?;
            Ok(!ends)
        })
    }
}

/// Prints the texts in order.
pub(super) struct Printer<'a> {
    prompts: &'a [String],
    is_chat: bool,
    out: &'a mut dyn Write,
    /// Number of texts begun.
    begun: usize,
    /// Text of prompts whose turn has not come.
    waiting: Vec<String>,
}

impl<'a> Printer<'a> {
    /// Begins with the first text. In a chat, answers are printed without their prompts.
    pub(super) fn new(prompts: &'a [String], is_chat: bool, out: &'a mut dyn Write) -> Result<Self> {
        let mut printer = Self { prompts, is_chat, out, begun: 0, waiting: vec![String::new(); prompts.len()] };
        printer.begin()?;
        Ok(printer)
    }

    /// Begins the next text.
    fn begin(&mut self) -> Result<()> {
        let (number, count) = (self.begun, self.prompts.len());
        if number > 0 {
            writeln!(self.out)?;
        }
        if count > 1 {
            writeln!(self.out, "--- {} of {count}", number + 1)?;
        }
        if !self.is_chat {
            write!(self.out, "{}", self.prompts[number])?;
        }
        self.begun += 1;
        Ok(self.out.flush()?)
    }

    /// Prints a piece if it belongs to the current text. In a batch, texts after the first are
    /// buffered.
    pub(super) fn print(&mut self, number: usize, piece: &str, batch: usize) -> Result<()> {
        // Texts of earlier batches are complete.
        self.print_waiting(number / batch * batch + 1)?;
        if number >= self.begun {
            self.waiting[number].push_str(piece);
            return Ok(());
        }
        write!(self.out, "{piece}")?;
        Ok(self.out.flush()?)
    }

    /// Prints the buffered texts.
    pub(super) fn finish(mut self) -> Result<()> {
        self.print_waiting(self.prompts.len())?;
        Ok(writeln!(self.out)?)
    }

    /// Begins texts up to number `texts` and prints their buffers.
    fn print_waiting(&mut self, texts: usize) -> Result<()> {
        while self.begun < texts {
            self.begin()?;
            write!(self.out, "{}", self.waiting[self.begun - 1])?;
        }
        Ok(())
    }
}
